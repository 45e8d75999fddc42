"""Octavo: serve language models from a paged KV cache, on the machine you own."""
