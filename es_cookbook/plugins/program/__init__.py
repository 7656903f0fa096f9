"""Programs that call a model over OpenAI's API, as problems to train on."""
