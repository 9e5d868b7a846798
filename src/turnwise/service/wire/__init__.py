"""JSON and protobuf bodies to our own types and back."""
