"""Prompts to replies: scheduling, the KV cache, decoding graphs, drawing, stops."""
