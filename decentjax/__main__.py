"""`python -m decentjax`, where the console script is not on the path."""

from decentjax.cli import main

main()
