"""From a folder of files to token ids: loading, the paged forward, sampling."""
