"""An endpoint that speaks OpenAI's API, for programs that know no other."""
