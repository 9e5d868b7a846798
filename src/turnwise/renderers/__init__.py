"""Messages to token ids and back, exactly: `get_renderer(tokenizer)` picks the chat format."""

from turnwise.renderers.base import Extension as Extension
from turnwise.renderers.base import Renderer as Renderer
from turnwise.renderers.choose import get_renderer as get_renderer
