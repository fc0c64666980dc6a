"""Training on meshes of several devices, compared with one device: its suite."""
