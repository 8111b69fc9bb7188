"""Keys and values: of prompts and what is decoded after them, and of earlier ones in shared blocks."""
