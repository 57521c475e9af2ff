"""Read what users bring: prompts, examples and a model's tokenizer.

What lives here: `rows` (rows of files), `prompts` (a data set, tokenized once), `order` (which prompts
come next), `tokenizer` (encoding, decoding, special tokens around a text, answers after a prompt), `chat_template`
(rendering messages), `conversations` (messages to train on, and which of their tokens are the assistant's).

May import: the base modules and `config`. No torch and no transformers: the conductor and login nodes import this.

To add a source of prompts: write a function like `PromptSet.load` that returns a `PromptSet`.
"""
