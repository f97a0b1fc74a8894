"""``python -m attnc`` is the command ``attnc``."""

from attnc.driver.cli import main

if __name__ == "__main__":
    main()
