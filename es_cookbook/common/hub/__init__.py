"""The Hugging Face Hub: one question before anything else is asked of it."""
