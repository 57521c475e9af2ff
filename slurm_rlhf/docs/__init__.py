"""Keep the documentation by topic, and show a page in a terminal.

What lives here: one Markdown page per topic, and `pages`: the topics, their texts, and the reference of all keys, which
is written from the schema, so that it cannot differ from it.

May import: the base modules and `config`. No torch.

To add a page: a file `<topic>.md` here that opens with what the reader gets, and its row in `pages.TOPICS`.
"""
