"""Language models and models of vectors: what every answer, vector and rank of the library and the API comes from."""
