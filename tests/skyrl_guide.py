"""The first settings of SkyRL's guide to training over many turns, as it spells them."""

BASIC_MULTI_TURN = """\
generator:
  backend: sglang
  use_conversation_multi_turn: true  # REQUIRED for SGLang
  max_turns: 5                        # Maximum turns per episode

  sampling_params:
    max_generate_length: 1024
    temperature: 1.0
"""
