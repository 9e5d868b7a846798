"""Half-open intervals of whole numbers: (start, end) holds start and not end."""
