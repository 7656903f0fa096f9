"""Tools of MCP servers (the Model Context Protocol), as tools of chats."""
