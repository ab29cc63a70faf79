"""Commit: applies the results of a step to its requests: tokens, cached pages, forks, ends.

Most results are one more token. The full commit runs from the position `commits_until` on, where a page is full,
or the answer may have reached its limit or has to be checked for repetition.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.core.stats import SchedulerStats
from mlxserve.request import (
    GUESS,
    Chunk,
    FinishReason,
    LiveRequest,
    Output,
    Sampled,
    SpeculationReport,
)
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.drafts import Drafts
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.repetition import repeats_itself
from mlxserve.scheduler.roster import Roster


class Commit:
    """Commits the results of steps, in the order of their launches."""

    def __init__(
        self,
        tables: PageTables,
        roster: Roster,
        admission: Admission,
        drafts: Drafts | None,
        stats: SchedulerStats,
    ) -> None:
        self._tables = tables
        self._page_size = tables.pool.page_size
        self._roster = roster
        self._admission = admission
        self._drafts = drafts
        self._stats = stats
        # Of an update that failed, as far as it came.
        self._unreturned: list[Output] = []
        # The request whose result is being committed: what fails meanwhile may lose a token of it.
        self.under_way: LiveRequest | None = None

    def update(
        self, chunks: Sequence[Chunk], sampled: Sequence[Sampled | None], now: int
    ) -> list[Output]:
        """Commit a step as `Scheduler.update` does, before step number `now + 1`."""
        outputs = self._unreturned = []
        self._tables.step_read()
        guided: list[LiveRequest] = []
        for chunk, result in zip(chunks, sampled, strict=True):
            self.under_way = request = chunk.request
            request.num_in_flight -= 1
            if chunk.start >= request.commits_until:
                outputs += self._commit_fully(chunk, result, now)
                if chunk.samples and request.asked.guide is not None:
                    guided.append(request)
                continue
            assert result is not None, f"{request.id}: sampled out of turn"
            request.token_ids.append(result.token_id)
            reason = FinishReason.STOP if result.token_id in request.ends_on else None
            if reason is not None:
                self._finish(request, reason)
            outputs.append(
                self.output(request, result, reason, chunk.start + 2 - request.num_prompt)
            )
        self.under_way = None
        self._tables.release_unused()
        if guided:
            self._ask_guides(guided)
        self._unreturned = []
        return outputs

    def _ask_guides(self, requests: Sequence[LiveRequest]) -> None:
        """Request the masks after the tokens just read, of all guides at once."""
        guides = []
        for request in requests:
            if not request.is_finished and (guide := request.feed_guide()) is not None:
                if self._drafts is not None and not (request.num_in_flight or guide.is_free):
                    guide.expect(self._drafts.likely(request))
                guides.append(guide)
        for guide in guides:
            guide.ask()

    def take_unreturned(self) -> list[Output]:
        """Return, once, the outputs that the last `update` committed before it failed."""
        outputs, self._unreturned = self._unreturned, []
        return outputs

    def _commit_fully(self, chunk: Chunk, result: Sampled | None, now: int) -> list[Output]:
        """Commit any kind of chunk: part of a prompt, with a draft, or of a request that has ended."""
        request = chunk.request
        assert chunk.samples == (result is not None), f"{request.id}: sampled out of turn"
        is_finished = request.is_finished
        taken: list[Sampled] = []
        reason = None
        if result is not None and not is_finished:
            taken, reason = self._take(request, result.guesses or chunk.draft, result)
        if chunk.draft:
            self._end_draft(chunk, result, taken)
        end = chunk.end
        if end % self._page_size < chunk.length:  # it reached the end of a page
            self._publish(chunk, end)
            if not is_finished:
                for kind in self._tables.ends:
                    kind.pass_by(request, min(end, request.num_computed))
        for kind in self._tables.ends:
            kind.commit(chunk)
        if is_finished:
            self._tables.release(request)
        elif taken:
            return self._read(request, taken, reason, now)
        return []

    def _take(
        self, request: LiveRequest, draft: Sequence[int], result: Sampled
    ) -> tuple[list[Sampled], FinishReason | None]:
        """Append the sampled tokens; return them, and the reason if the request ends with them.

        The token after a draft's token is accepted if that token equals the one that was sampled in its
        place, up to a token that ends the request. The numbers drawn for a position depend on seed
        and position alone (`sampler.key_of`), so these are the tokens that steps of one token would
        sample, also at a temperature: nothing is rejected at random.
        """
        taken = [result]
        request.token_ids.append(result.token_id)
        reason = self._reason(request)
        for guess, following in zip(draft, result.more, strict=True):
            if reason is not None or guess != taken[-1].token_id:
                break
            taken.append(following)
            request.token_ids.append(following.token_id)
            reason = self._reason(request)
        return taken, reason

    def _reason(self, request: LiveRequest) -> FinishReason | None:
        """Return the reason if the request ends with its newest token; None if it continues."""
        if request.token_ids[-1] in request.ends_on:
            return FinishReason.STOP
        if len(request.token_ids) >= self._tables.capacity.max_length(request):
            return FinishReason.LENGTH
        return FinishReason.REPETITION if _is_in_loop(request) else None

    def _end_draft(self, chunk: Chunk, result: Sampled | None, taken: Sequence[Sampled]) -> None:
        """Count the rows of accepted tokens as computed; the others will be overwritten."""
        request, num_accepted = chunk.request, max(0, len(taken) - 1)
        num_drafted = len(chunk.draft)
        if result is not None and result.guesses:
            num_drafted -= result.guesses.count(GUESS)
        request.is_drafting = False
        request.num_computed += num_accepted
        request.num_drafted += num_drafted
        request.num_accepted += num_accepted
        self._stats.num_drafts += 1
        _count_by_position(request, self._stats, num_accepted)
        self._stats.drafted_tokens += num_drafted
        self._stats.accepted_tokens += num_accepted
        if taken:
            self._roster.fair_share.charge(request.asked.client, decode=num_accepted)
            if self._drafts is not None and num_drafted:
                self._drafts.learn(request, num_drafted, num_accepted)

    def _publish(self, chunk: Chunk, end: int) -> None:
        """Publish the pages that a computed chunk, which ends at position `end`, has completed."""
        request, page_size = chunk.request, self._page_size
        # A token that was dropped with its request's end stays unknown.
        end = min(end, len(request.token_ids))
        if chunk.draft:
            end = min(end, request.num_computed)  # the rows of rejected tokens hold others' keys
        first, end = chunk.start // page_size, end // page_size
        if first < end:
            self._tables.publish(request, first, end)
            self._roster.pages_published(request.page_hashes[first:end])

    def _read(
        self,
        request: LiveRequest,
        taken: Sequence[Sampled],
        reason: FinishReason | None,
        now: int,
    ) -> list[Output]:
        """Finish a request for this reason, or let it continue, and report its newest tokens."""
        if len(request.token_ids) == request.num_prompt + 1:
            self._fork(request, now)
        if reason is not None:
            self._finish(request, reason)
        else:
            request.commits_until = self._next_full_commit(request)
        first = request.num_outputs - len(taken) + 1
        outputs = [self.output(request, each, None, first + i) for i, each in enumerate(taken[:-1])]
        return [*outputs, self.output(request, taken[-1], reason, request.num_outputs)]

    def _next_full_commit(self, request: LiveRequest) -> int:
        """Return the position from which chunks need the full commit."""
        params = request.asked.params
        if request.asked.guide is not None or params.stop_on_repetition:
            return 0
        unread = len(request.token_ids) - 1
        end_of_page = unread // self._page_size * self._page_size + self._page_size - 1
        return min(end_of_page, self._tables.capacity.max_length(request) - 2)

    def output(
        self,
        request: LiveRequest,
        result: Sampled | None,
        reason: FinishReason | None,
        num_outputs: int,
    ) -> Output:
        """Return an output; `num_outputs` counts the tokens of the answer up to this one."""
        speculation = None
        if self._drafts is not None:
            speculation = SpeculationReport(
                request.num_drafted, request.num_accepted, tuple(request.accepted_at)
            )
        return Output(
            request.id,
            (result.token_id,) if result else (),
            reason,
            request.num_prompt,
            request.num_cached,
            request.cache,
            (result.logprob,) if result and result.logprob else (),
            num_outputs,
            speculation,
        )

    # ---- ends

    def _finish(self, request: LiveRequest, reason: FinishReason) -> None:
        if request.asked.pins:
            self._tables.pin(request)
            self._roster.prefixes[request.id] = request.asked
        self.end(request, reason)

    def end(self, request: LiveRequest, reason: FinishReason) -> None:
        """End a request, and release its pages."""
        self._roster.end(request, reason)
        if self._drafts is not None:
            self._drafts.forget(request)
        self._tables.end(request)

    # ---- samples of one prompt

    def _fork(self, leader: LiveRequest, now: int) -> None:
        """Start the forks of a leader whose prompt has been computed, or queue them."""
        for fork in self._roster.forks.pop(leader):
            fork.leader = None
            passed = None if fork.num_prompt == 1 else self._admission.passed_by_fork(fork, now)
            if passed is None:
                self._roster.queue([fork])
            else:
                self._start_fork(fork, leader)
                self._admission.count_overtaken(passed)

    def _start_fork(self, fork: LiveRequest, leader: LiveRequest) -> None:
        num_shared, cache = self._tables.fork(fork, leader), self._tables.cache
        self._roster.start_fork(fork)
        fork.prefill_end = fork.num_prompt
        fork.cache = cache.report_fork(fork, num_shared)
        fork.num_cached = fork.cache.num_tokens
        self._roster.fair_share.charge(fork.asked.client, prefill=1)
        self._stats.prompt_tokens += fork.num_prompt
        if cache.serves(fork):
            self._stats.prefix_queries += fork.num_prompt
            self._stats.prefix_hits += fork.num_cached


def _count_by_position(request: LiveRequest, stats: SchedulerStats, num_accepted: int) -> None:
    counts = request.accepted_at
    counts += [0] * (num_accepted - len(counts))
    for position in range(num_accepted):
        counts[position] += 1
        stats.accepted_at[str(position)] += 1


def _is_in_loop(request: LiveRequest) -> bool:
    params = request.asked.params
    return (
        params.stop_on_repetition
        and request.num_outputs >= params.min_tokens
        and repeats_itself(request.token_ids, request.num_prompt)
    )
