"""What is sent to the engine: conversations, examples, demos."""
