"""The four tools: a typed request in, a typed report out. The command line, the loop and the MCP server all call these."""
