"""View: the weights that compute a request: the model's own, or those with one adapter."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class View:
    """Weights of an engine. Views share its pool and its steps, but never a page.

    name: in the API
    salt: names the weights; it has no zero byte
    number: of the adapter in the engine; None for the model alone
    """

    name: str
    salt: str
    number: int | None = None

    def page_salt(self, cache_salt: str | None) -> bytes:
        """The salt of a request's pages, which no other view has for any `cache_salt`."""
        # The view's salt has no zero byte: no `cache_salt` can pass for another view's.
        text = f"{self.salt}\0{cache_salt or ''}"
        return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

    def with_adapter(self, number: int, name: str, digest: str) -> View:
        """Return the view with an adapter, whose pages are found by its digest."""
        return View(f"{self.name}:{name}", f"{self.salt}/{digest}", number)
