"""What users bring: JSONL files of prompts, tokenized and ordered. No torch."""
