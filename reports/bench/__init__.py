"""Speed side by side: the same work in JAX and in megalodon-hf, and the floors beneath it."""
