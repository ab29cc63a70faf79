"""Who is at the door, what is fetched, kept and deleted: without each rule a test fails."""

from __future__ import annotations

import pytest

from mlxserve.api.access import names, security
from mlxserve.api.access.names import HostNames
from mlxserve.api.access.security import OriginCheck
from mlxserve.cli import uninstall
from mlxserve.core.errors import InvalidRequest
from mlxserve.hub.gguf import reader
from mlxserve.images import picture
from mlxserve.images.decode import ImageDecoder
from mlxserve.images.domains import AllowedDomains
from mlxserve.images.remote import RemoteFiles
from mlxserve.mcp import servers_file
from mlxserve.service.unit import ServiceUnit
from mlxserve.system import addresses
from mlxserve.system.owned_cache import OwnedCache
from mlxserve.text.guidance.matcher_host import MatcherHost
from tests.api.access import test_security
from tests.api.conftest import chat as chat
from tests.api.conftest import client as client
from tests.cli import test_service, test_uninstall
from tests.cli.conftest import run as run
from tests.cli.test_uninstall import home as home
from tests.hub.gguf import test_reader
from tests.images import test_decode, test_domains, test_picture, test_remote
from tests.images.test_decode import decoder as decoder
from tests.mcp import test_servers_file
from tests.mcp.test_servers_file import servers as servers
from tests.mutation.bug import Bug
from tests.system import test_addresses, test_owned_cache
from tests.text.guidance import test_grammars

pytestmark = pytest.mark.mutation

FOUND: dict[str, Bug] = {
    "take a name that ends like one of ours for one": Bug(
        names,
        "_is_below",
        "name.endswith(suffixes)",
        "name.endswith(tuple(suffix[1:] for suffix in suffixes))",
        test_security.test_another_host_is_refused,
        {"host": "evil-local"},
    ),
    "take a name without a label for one of ours": Bug(
        names,
        "_is_below",
        'all(name.split("."))',
        "True",
        test_security.test_another_host_is_refused,
        {"host": "a..internal"},
    ),
    "take a page of any name in .local for our own": Bug(
        HostNames,
        "cannot_be_rebound",
        "(ON_THIS_MACHINE,)",
        "(ON_THIS_MACHINE, *IN_THIS_NETWORK)",
        test_security.test_a_page_of_a_name_that_may_be_rebound_is_not_ours,
        {"host": "evil.local:8000"},
    ),
    "look at the page of an Origin header alone": Bug(
        OriginCheck,
        "_allows",
        'return "same-origin" not in sites or self._is_our_page(scope)',
        "return True",
        test_security.test_a_page_of_a_name_that_may_be_rebound_is_not_ours,
        {"host": "evil.internal:8000"},
    ),
    "look at the beginning of an origin": Bug(
        security,
        "is_of_app",
        ".fullmatch(",
        ".match(",
        test_security.test_web_pages_are_refused,
        {"headers": {"origin": "app://a,https://evil.com"}},
    ),
    "take a metadata address for public": Bug(
        test_addresses,
        "is_public",
        "*_SPECIAL)",
        ")",
        test_addresses.test_metadata_addresses_of_clouds_are_not_public,
    ),
    "read the wrong bytes of an address in another": Bug(
        addresses,
        "_ipv4_in",
        ">> 80",
        ">> 64",
        test_addresses.test_an_address_with_another_in_it_leads_there,
        {"prefix": "::ffff:"},
    ),
    "take a name below an address for one below a domain": Bug(
        AllowedDomains,
        "allow",
        "each in self.names and addresses.parse(each) is None",
        "each in self.names",
        test_domains.test_what_looks_like_a_domain_is_not,
        {"host": "1.203.0.113.7"},
    ),
    "take the end of a name for a domain": Bug(
        AllowedDomains,
        "allow",
        "if name in self.names",
        "if name.endswith(tuple(self.names))",
        test_domains.test_what_looks_like_a_domain_is_not,
        {"host": "evilexample.org"},
    ),
    "follow a redirect to any domain": Bug(
        RemoteFiles,
        "_request",
        'if not self._domains.allow(url.raw_host.decode("ascii"))',
        "if False",
        test_remote.test_nothing_is_fetched_from_another_domain_also_after_a_redirect,
    ),
    "push out what was kept first, whoever sent it": Bug(
        OwnedCache,
        "_evict",
        "max(self._kept, key=self._sizes.__getitem__)",
        "next(iter(self._kept))",
        test_owned_cache.test_much_of_one_owner_pushes_out_its_own_alone,
    ),
    "find a picture that another key has sent": Bug(
        ImageDecoder,
        "decode",
        "key = await run_fairly(",
        'owner = ""; key = await run_fairly(',
        test_decode.test_a_picture_of_another_key_is_decoded_as_if_it_were_new,
    ),
    "find the features of a picture that another key has sent": Bug(
        picture,
        "_key",
        "if owner:",
        "if False:",
        test_picture.test_a_picture_of_another_key_has_another_hash,
    ),
    "find a schema that another key has sent": Bug(
        MatcherHost,
        "_kept_grammar",
        "known = self._kept.get(owner, source)",
        'owner = ""; known = self._kept.get(owner, source)',
        test_grammars.test_a_schema_of_another_key_is_compiled_as_if_it_were_new,
    ),
    "delete a folder that was there before": Bug(
        uninstall,
        "is_marked",
        "return False",
        "return True",
        test_uninstall.test_a_folder_that_was_there_before_we_wrote_into_it_stays,
    ),
    "mark a folder of somebody else": Bug(
        test_uninstall,
        "make_marked_folder",
        "if not any(folder.iterdir()):",
        "if True:",
        test_uninstall.test_a_folder_that_was_there_before_we_wrote_into_it_stays,
    ),
    "run commands that others may write": Bug(
        servers_file,
        "_check_owner",
        "if state.st_mode & others and not is_sticky:",
        "if False:",
        test_servers_file.test_commands_that_others_may_write_are_not_run,
        {"mode": 0o622, "is_folder": False},
    ),
    "take the sticky bit of a file for that of a folder": Bug(
        servers_file,
        "_check_owner",
        "stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX",
        "True",
        test_servers_file.test_commands_that_others_may_write_are_not_run,
        {"mode": 0o602, "is_folder": True},
    ),
    "see only tensors that begin at one place": Bug(
        reader,
        "_refuse_overlaps",
        "before.offset + before.nbytes > after.offset",
        "before.offset == after.offset",
        test_reader.test_tensors_that_share_a_byte_are_refused_and_no_others,
    ),
    "take the last of two values": Bug(
        reader,
        "_metadata",
        "if key in metadata:",
        "if False:",
        test_reader.test_a_forged_header_is_refused,
        {"content": test_reader.FORGED["two values of a key"]},
    ),
    "look for line feeds only in a unit": Bug(
        ServiceUnit,
        "check_texts",
        "if not text.isprintable():",
        'if "\\n" in text:',
        test_service.test_no_text_of_a_unit_ends_its_line,
        {"end": "\r", "place": "command"},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_rule_that_is_broken_is_found(name: str, request: pytest.FixtureRequest) -> None:
    FOUND[name].check_found(
        request, (AssertionError, LookupError, InvalidRequest, pytest.fail.Exception)
    )
