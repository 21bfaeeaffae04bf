"""What the MCP server is made of: jobs that outlive it, tools, resources, prompts, skills and tasks. `agent.server` puts them together."""
