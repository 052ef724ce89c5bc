// Follows the grammars of many sequences. The grammars are llguidance's, called by its C functions; a sequence is one
// thread's at a time, and Python is not needed.
#pragma once

#include <time.h>

#include <cstdint>
#include <cstring>

namespace grammar {

// llguidance's functions; `void*` is its LlgMatcher.
struct Functions {
    int32_t (*consume_tokens)(void*, const uint32_t*, size_t);   // 0, or -1 for an error
    int32_t (*validate_tokens)(void*, const uint32_t*, size_t);  // how many of them can come
    int32_t (*rollback)(void*, size_t);                          // 0, or -1 for an error
    int32_t (*compute_mask_into)(void*, uint32_t*, size_t);      // 0, or -1 for an error
    bool (*is_accepting)(void*);
    bool (*is_stopped)(void*);
    bool (*is_error)(void*);
};

// As `kernels.cpu.grammar.Outcome`.
enum Outcome : int64_t { FOLLOWED, ENDED, REFUSED, FAILED, SLOW, STUCK };

struct Arguments {
    const Functions* functions;
    int64_t sequences;
    void* const* matchers;       // [sequences]; null: the sequence has ended
    const int64_t* token_ends;   // [sequences], of a sequence's tokens in `tokens`, which lie end to end
    const int64_t* num_drafted;  // [sequences], how many of its tokens are drafted, the last ones
    const uint32_t* tokens;
    const uint32_t* const* text_bits;  // [sequences], of the tokens that end no sequence, [words]
    const uint32_t* const* stop_bits;  // [sequences], of those that end this one, [words]
    const uint32_t* plain_bits;        // of the tokens that are text, [words]
    const int64_t* first_places;       // [sequences]: the place behind a sequence; those behind drafted tokens follow
    int64_t words;
    double max_seconds;  // computing time at a place, beyond which its sequence fails
    int64_t* outcomes;   // [sequences]
    int64_t* refused;    // [sequences], which of its tokens was refused
    double* seconds;     // [sequences], at the slowest place
    int64_t threads;
};

inline bool has(const uint32_t* bits, uint32_t token) { return bits[token / 32] >> token % 32 & 1; }

inline double seconds_of(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Measures computing time of a thread. That clock takes a microsecond to read, so it is read only where the time by the
// wall, in which other work may have come between, is long.
class Stopwatch {
  public:
    void start() { wall_ = seconds_of(CLOCK_MONOTONIC); }

    // At least the computing time since `start`, and at most the time by the wall.
    double stop() {
        const double wall = seconds_of(CLOCK_MONOTONIC) - wall_;
        if (wall < SHORT) return wall;
        const double before = computed_;
        computed_ = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        return computed_ - before < wall ? computed_ - before : wall;
    }

  private:
    static constexpr double SHORT = 0.01;

    double wall_ = 0, computed_ = seconds_of(CLOCK_THREAD_CPUTIME_ID);
};

enum Verdict { ALLOWED, NOT_ALLOWED, BROKEN };

// One sequence and its matcher.
class Sequence {
  public:
    Sequence(const Arguments& args, int64_t i, Stopwatch& stopwatch)
        : num_drafted(args.num_drafted[i]),
          first_place(args.first_places[i]),
          a(args),
          f(*args.functions),
          watch(stopwatch),
          index(i),
          matcher(args.matchers[i]),
          start(i ? args.token_ends[i - 1] : 0),
          text(args.text_bits[i]),
          stops(args.stop_bits[i]) {}

    // Takes the new tokens, and calls `visit(place, *this)` behind them, then behind each drafted token that can come; it
    // returns a verdict. Returns for how many places that went well: none where the sequence has ended, or fails.
    template <typename Visit>
    int64_t follow(const Visit& visit) {
        int64_t num_visited = 0;
        a.refused[index] = 0;
        a.seconds[index] = 0;
        const Outcome outcome = walk(visit, num_visited);
        a.outcomes[index] = outcome;
        return outcome == FOLLOWED ? num_visited : 0;
    }

    // Whether a token may come where the matcher stands; a negative one may not. `mask` is filled where it may not.
    Verdict judge(int64_t token, uint32_t* mask) {
        if (token >= 0 && allows((uint32_t)token)) return ALLOWED;
        if (!fill(mask)) return BROKEN;
        return token >= 0 && has(mask, (uint32_t)token) ? ALLOWED : NOT_ALLOWED;
    }

    const int64_t num_drafted, first_place;

  private:
    template <typename Visit>
    Outcome walk(const Visit& visit, int64_t& num_visited) {
        if (!matcher) return ENDED;
        const uint32_t *tokens = a.tokens + start, *draft = a.tokens + a.token_ends[index] - num_drafted;
        for (const uint32_t* next = tokens; next < draft; next++) {
            if (has(stops, *next)) return ENDED;
            if (f.consume_tokens(matcher, next, 1)) {
                a.refused[index] = next - tokens;
                return REFUSED;
            }
        }
        Outcome outcome = at(visit, 0);
        for (num_visited = 1; num_visited <= num_drafted && outcome == FOLLOWED; num_visited++) {
            const uint32_t* next = draft + num_visited - 1;
            if (has(stops, *next) || f.validate_tokens(matcher, next, 1) != 1) break;
            if (f.consume_tokens(matcher, next, 1)) return FAILED;
            outcome = at(visit, num_visited);
        }
        if (outcome != FOLLOWED || num_visited == 1) return outcome;
        return f.rollback(matcher, (size_t)(num_visited - 1)) ? STUCK : FOLLOWED;
    }

    template <typename Visit>
    Outcome at(const Visit& visit, int64_t place) {
        watch.start();
        const Verdict verdict = visit(first_place + place, *this);
        const double seconds = watch.stop();
        if (seconds > a.seconds[index]) a.seconds[index] = seconds;
        if (verdict == BROKEN || f.is_error(matcher)) return FAILED;
        return seconds > a.max_seconds ? SLOW : FOLLOWED;
    }

    // Whether the mask has the token, or false where that cannot be told without it.
    bool allows(uint32_t token) {
        if (has(stops, token)) return f.is_accepting(matcher);
        if (!has(text, token) || !has(a.plain_bits, token) || f.is_stopped(matcher)) return false;
        return f.validate_tokens(matcher, &token, 1) == 1;
    }

    // The mask of the tokens that may come where the matcher stands.
    bool fill(uint32_t* mask) {
        if (f.is_stopped(matcher)) {
            memset(mask, 0, (size_t)a.words * sizeof *mask);
        } else if (f.compute_mask_into(matcher, mask, (size_t)a.words * sizeof *mask)) {
            return false;
        }
        const uint32_t ends = f.is_accepting(matcher) ? ~0u : 0u;
        for (int64_t w = 0; w < a.words; w++) mask[w] = (mask[w] & text[w]) | (stops[w] & ends);
        return true;
    }

    const Arguments& a;
    const Functions& f;
    Stopwatch& watch;
    const int64_t index;
    void* const matcher;
    const int64_t start;
    const uint32_t *const text, *const stops;
};

}  // namespace grammar
