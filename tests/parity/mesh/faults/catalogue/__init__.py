"""The planted parallel bugs, one module per witness."""
