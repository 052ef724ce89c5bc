"""An MCP server for the tests, over stdio: python mcp_tools.py. It keeps a total, to tell servers apart."""

import os
import sys
import time

try:
    from mcp.server import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("tools of the tests")
total = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def keep(number: int) -> str:
    """Add to the total, and return it."""
    global total
    total += number
    return f"total {total}"


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def sleep(seconds: float) -> str:
    """Take its time."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def flood() -> str:
    """Return far too much."""
    return "x" * (1 << 19)


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "none")


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit(5)
    server.run("stdio")
