"""The second architecture under the probes: router, latent attention, defects, a training drill."""
