"""Make a page that shows a run or compares several: report.html, which needs no network and no other file.

`pictures` computes the sections of the page, as pure functions; `page` reads run directories, puts sections and
settings into one JSON document, and that into the HTML of `page/`, which it writes.

May import: the base modules, `config`, `observe`, `placement`. No numpy, because the command line writes reports, too.

To show something more: record it (`observe`), a function here that returns plain data, a function of `page/*.js` that
draws it, and its row in the table of sections of `page/main.js`. `page/page.html` names the scripts.
"""
