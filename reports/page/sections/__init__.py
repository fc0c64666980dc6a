"""The sections of the page, one module each: from a run to what a template draws."""
