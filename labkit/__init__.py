"""Measures what training optimisations do to the memory and speed of a LoRA step."""
