"""Real proxies before the router, as docs/kubernetes.md says that they should be set up.

Each is started before addresses of routers, and answers at 127.0.0.1 on the port that is yielded.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from router.common.child_processes import ChildProcess, ChildProcesses
from tests.conftest import find_free_ports
from tests.k8s import binaries
from tests.k8s.cluster import Cluster

Addresses = Sequence[tuple[str, int]]
Fields = dict[str, Any]
TYPES = "type.googleapis.com/envoy.extensions.filters"
# A stream lasts as long as it does; its silences are the router's to end (--stream-heartbeat).
ENVOY_ROUTE: Fields = {
    "timeout": "0s",
    "retry_policy": {
        # Only what surely reached nobody, or nobody who did something.
        "retry_on": "connect-failure,refused-stream,reset-before-request",
        "num_retries": 2,
    },
}
MANY = 1_000_000
ENVOY_CLUSTER: Fields = {
    "circuit_breakers": {
        "thresholds": [
            {
                "max_connections": MANY,
                "max_pending_requests": MANY,
                "max_requests": MANY,
                "max_retries": MANY,
            }
        ]
    },
    "health_checks": [
        {
            "timeout": "10s",
            "interval": "0.2s",
            "no_traffic_interval": "0.2s",
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "http_health_check": {"path": "/ready"},
        }
    ],
}
HAPROXY = """
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 1h
  timeout server 1h
frontend public
  bind 127.0.0.1:{port}
  default_backend routers
backend routers
{servers}
"""
NGINX = """
daemon off;
error_log stderr error;
pid {folder}/pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder};
  proxy_temp_path {folder};
  fastcgi_temp_path {folder};
  uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  upstream routers {{ {servers} keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://routers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
"""


@contextlib.contextmanager
def envoy(
    folder: Path, routers: Addresses, route: Fields = ENVOY_ROUTE, cluster: Fields = ENVOY_CLUSTER
) -> Iterator[int]:
    port, admin = find_free_ports(2)
    path = folder / f"envoy-{port}.json"
    path.write_text(json.dumps(_envoy(port, admin, routers, route, cluster)))
    flags = ("--concurrency", "1", "--log-level", "error", "--disable-hot-restart")
    with _running(folder, "envoy", "-c", str(path), *flags):
        yield port


def _envoy(port: int, admin: int, routers: Addresses, route: Fields, cluster: Fields) -> Fields:
    filters = [
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": f"{TYPES}.http.router.v3.Router"},
        }
    ]
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "routers", **route}}]
    manager = {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "public",
        "use_remote_address": True,
        "http_filters": filters,
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}],
        },
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoints = [{"endpoint": {"address": _address(*router)}} for router in routers]
    upstream = {
        "name": "routers",
        "connect_timeout": "5s",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "routers",
            "endpoints": [{"lb_endpoints": endpoints}],
        },
        **cluster,
    }
    listener = {"address": _address("127.0.0.1", port), "filter_chains": [chain]}
    return {
        "admin": {"address": _address("127.0.0.1", admin)},
        "static_resources": {"listeners": [listener], "clusters": [upstream]},
    }


def _address(host: str, port: int) -> Fields:
    return {"socket_address": {"address": host, "port_value": port}}


@contextlib.contextmanager
def traefik(folder: Path, cluster: Cluster, port: int) -> Iterator[None]:
    """Serves the Gateways of the cluster that listen on `port`."""
    provider = "--providers.kubernetesgateway"
    flags = (
        f"--entrypoints.web.address=127.0.0.1:{port}",
        provider,
        f"{provider}.endpoint={cluster.url}",
        f"{provider}.token={cluster.token}",
        f"{provider}.certauthfilepath={cluster.ca}",
        "--log.level=INFO",
        "--global.checknewversion=false",
        "--global.sendanonymoususage=false",
    )
    with _running(folder, "traefik", *flags):
        yield


@contextlib.contextmanager
def haproxy(folder: Path, routers: Addresses) -> Iterator[int]:
    [port] = find_free_ports(1)
    servers = [f"  server r{at} {host}:{to}" for at, (host, to) in enumerate(routers)]
    path = folder / "haproxy.cfg"
    path.write_text(HAPROXY.format(port=port, servers="\n".join(servers)))
    with _running(folder, "haproxy", "-f", str(path)):
        yield port


@contextlib.contextmanager
def nginx(folder: Path, routers: Addresses) -> Iterator[int]:
    [port] = find_free_ports(1)
    servers = " ".join(f"server {host}:{to};" for host, to in routers)
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    with _running(folder, "nginx", "-p", str(folder), "-c", str(path), "-e", "stderr"):
        yield port


@contextlib.contextmanager
def _running(folder: Path, name: str, *flags: str) -> Iterator[ChildProcess]:
    family = ChildProcesses(folder)
    child = family.start(name, [binaries.gateway(name), *flags], "")
    try:
        yield child
        child.check()
    finally:
        child.process.kill()  # some would wait for their connections
        family.stop()


async def until_listening(port: int) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
