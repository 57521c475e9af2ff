"""Keep the documentation by topic, and show a page in a terminal.

What lives here: one Markdown page per topic, `pages` (the topics, their texts, how a terminal shows them), `keys` (the
reference of all keys, written from the schema).

May import: the base modules and `config`. No torch.

To add a page: a file `<topic>.md` here that opens with what the reader gets, and its row in `pages.TOPICS`.
"""
