"""The second architecture, MLA + MoE (DeepSeek-V3): its suite and its section of the page."""
