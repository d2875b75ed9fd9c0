"""What `octavo.llm` is made of: prompts, running requests to their ends, beam search, metrics."""
