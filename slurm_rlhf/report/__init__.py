"""One page that shows a run, or several beside each other: report.html, which needs no network and no other file.

`run_files` reads a run directory; `curves`, `timeline` and `nodes` make of it what a section of the page shows, as pure
functions; `content` puts them together into one JSON document, beside the settings, and `page` that into the HTML of
`page/`, which it writes.

May import: the base modules, `config`, `observe`, `placement`. No numpy: the command line writes reports, too.

To show something more: record it (`observe`), a function here that answers plain data, a function of `page/*.js` that
draws it, and its row in the table of sections of `page/main.js`.
"""
