"""A Hugging Face model in: its layers, its linear products, and the LoRA adapters on them."""
