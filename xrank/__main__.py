"""``python -m xrank`` is ``xrank``."""

from xrank.cli.main import main

if __name__ == "__main__":
    main()
