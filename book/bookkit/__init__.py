"""How the book is built: what a page depends on, executed notebooks from the cache, assets of the site."""
