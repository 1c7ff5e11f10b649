"""The command line: commands, their options and help, and other servers' spellings."""
