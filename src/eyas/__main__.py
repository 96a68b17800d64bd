"""`python -m eyas`: the same program, where no script was installed or another Python is to run it."""

from eyas.cli import main

if __name__ == "__main__":
    main()
