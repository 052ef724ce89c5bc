"""Access rights: keys, and web pages of other origins."""

import hmac
from collections.abc import Mapping

from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Access, Reply


class Guard:
    """Refuses requests that may not be made, and lets pages of allowed origins read the answers."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._is_local, self._local_hosts = options.is_loopback, ("localhost", "127.0.0.1", "[::1]", options.host, "")
        keys = options.api_key, options.admin_key
        self._client_keys = [key.encode() for key in keys if key is not None]
        self._admin_keys = [] if options.admin_key is None else [options.admin_key.encode()]

    def check(self, access: Access, headers: Mapping[str, str]) -> None:
        """Raise `HttpProblem` 401 without the right key, 403 if no key would do, and for pages of other origins."""
        self._check_origin(headers)
        if access is Access.ANYONE or not self._client_keys:
            return
        if access is Access.ADMIN and not self._admin_keys:
            raise HttpProblem(403, "Control is closed: the server was started with --api-key and without --admin-key.")
        allowed = self._admin_keys if access is Access.ADMIN else self._client_keys
        given = key_of(headers)
        # All are compared, in constant time: the time that it takes reveals nothing.
        if not sum([hmac.compare_digest(given, key) for key in allowed]):
            which = "the admin key" if access is Access.ADMIN else "the API key"
            what = "no key" if not given else "another key"
            message = f"This route needs {which}, and {what} came: send the header 'Authorization: Bearer KEY'."
            raise HttpProblem(401, message, headers={"www-authenticate": "Bearer"})

    def headers_for_pages(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers of a response by which a browser lets the scripts of an allowed page read it; none for others."""
        origin = headers.get("origin")
        if origin not in self._options.allowed_origins:
            return {}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": "*", "vary": "origin"}

    def answer_preflight(self, headers: Mapping[str, str]) -> Reply:
        """The response to a browser that asks whether a page may send a request. Raises `HttpProblem` 403."""
        self._check_origin(headers)
        asked = headers.get("access-control-request-headers", "")
        more = {"access-control-allow-headers": asked} if asked else {}
        return Reply(None, headers={"access-control-allow-methods": "GET, POST, PUT", **more})

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """A page in a browser may send requests to this machine: refuse those of pages that are not allowed.

        Browsers name a page in `Origin` when one of its scripts or forms calls. Images, links and frames have none:
        then `Sec-Fetch-Site` shows that another page asks ("same-site" is another port of this machine). Under a name
        that its own server gives this machine, the browser would call it the page's own origin: see `Host`.
        """
        origin = headers.get("origin")
        if origin is not None and origin not in self._options.allowed_origins:
            raise HttpProblem(403, f"Pages of {origin!r:.200} may not call: start the server with --allowed-origins.")
        site = headers.get("sec-fetch-site", "none")
        if origin is None and site not in ("none", "same-origin"):
            what = f"Another page has your browser send this request ('Sec-Fetch-Site: {site:.40}')"
            raise HttpProblem(403, f"{what}: open the address itself, or start the server with --allowed-origins.")
        if not self._is_local or self._client_keys:
            return
        host = headers.get("host", "")
        name, _, port = host.rpartition(":")
        if (name if port.isdigit() else host) not in self._local_hosts:
            message = f"The header 'Host: {host:.200}' names another machine. Without keys it must be localhost."
            raise HttpProblem(403, message)


def key_of(headers: Mapping[str, str]) -> bytes:
    """The key of a request, as `Authorization: Bearer KEY` or `X-Api-Key`; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1", "replace")
    return headers.get("x-api-key", "").encode("latin-1", "replace")
