"""All pages that quote the code, each as its own script writes it.

Run this to write anew what is out of date. `make test` and `make check` do so first, and end
at once if there was any: it is to be committed.
"""

import os
import sys

import edits_page
import errors
import pages

PAGES = {
    edits_page.PAGE: edits_page.page,
    edits_page.SITE_PAGE: edits_page.site_page,
    errors.PAGE: errors.page,
    errors.MESSAGES: errors.messages,
    pages.FLAGS: pages.flags_page,
}


def main() -> int:
    """Return 1 if a page was out of date."""
    os.environ["COLUMNS"] = "120"  # of --help, whatever terminal this is
    status = 0
    for path, write in PAGES.items():
        text = write()
        if path.read_text() != text:
            path.write_text(text)
            print(f"{path} was out of date: commit it")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
