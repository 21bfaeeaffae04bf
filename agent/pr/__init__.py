"""Pull requests: what is claimed, the series of commits, the text, where it is opened, and how a reviewer checks it."""
