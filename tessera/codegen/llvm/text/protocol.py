"""Runtime protocol: the functions, words and limits that the emitted text and the runtime share.

    void @tessera_meet(i64 context)
    void @tessera_report(i64 context, i64 site, i64 program, ptr table)
    void @tessera_poll(ptr word)

The stop word @tessera_failure of a text is NO_FAILURE while a launch runs undisturbed. Programs read it in each
iteration of a loop, between programs and after a barrier; where it is another number they call @tessera_poll, which may
change it, and end if it is below FIRST_KEY.

The grid barrier calls the runtime, which runs every program of a cooperative launch in a thread of its own; `context`
is the word @tessera_meeting of the text, set before the launch. When a program has ended, so that the barrier cannot
complete, the stop word becomes BARRIER_BROKEN. A report stores its operands and passes
`table`, their addresses; `site` is the number of the report in the host plan. A failed assertion ends its program.

An index out of bounds is replaced by 0, and reported if it is the first of its launch: the stop word keeps the least
key of the failures (program + 1, then site). A program whose key would be greater does not start, and no further launch
begins, so the failure that is reported does not depend on the order of threads.
"""

from __future__ import annotations

# The stop word: whether programs go on.
FAILURE_WORD, POLL_FUNCTION = "tessera_failure", "tessera_poll"
# The values of the word, as unsigned numbers; those between are keys of failures, which end no program that runs.
FAILURE_PROGRAM_BIT = 20  # of a key: the first bit of the number of the program plus 1; below is that of the site
INTERRUPTED, BARRIER_BROKEN, FIRST_KEY = 0, 1, 1 << FAILURE_PROGRAM_BIT
PENDING, NO_FAILURE = -2, -1

BARRIER_FUNCTION, BARRIER_CONTEXT = "tessera_meet", "tessera_meeting"
# Each program of a cooperative launch has a thread of the operating system.
MAX_BARRIER_PROGRAMS = 256

REPORT_FUNCTION, REPORT_CONTEXT = "tessera_report", "tessera_context"

PLAN_SEAL = "; plan sha256 "  # the last line of the text: machine code trusts its plan's addresses
