// Follows the grammars of many sequences at once, and fills the masks of the tokens that they allow next. The grammars are
// llguidance's, called by its C functions; each sequence is one thread's, and Python is not needed but for a text that
// llguidance has to see as tokens for the first time.
#include <time.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "openmp.h"

namespace {

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
enum Outcome : int64_t { FILLED, ENDED, REFUSED, FAILED, SLOW, STUCK };

struct Arguments {
    const Functions* functions;
    int64_t sequences;
    void* const* matchers;       // [sequences]; null: the sequence has ended, and its masks allow all
    const int64_t* token_ends;   // [sequences], of a sequence's tokens in `tokens`, which lie end to end
    const int64_t* num_drafted;  // [sequences], how many of its tokens are drafted, the last ones
    const uint32_t* tokens;
    const uint32_t* const* text_bits;  // [sequences], of the tokens that end no sequence, [words]
    const uint32_t* const* stop_bits;  // [sequences], of those that end this one, [words]
    uint32_t* masks;                   // [words] each: one behind each sequence, then one behind each drafted token
    const int64_t* first_masks;        // [sequences], index of the mask behind a sequence
    int64_t words;
    double max_seconds;  // computing time of a mask, beyond which its sequence fails
    int64_t* outcomes;   // [sequences]
    int64_t* places;     // [sequences], which of its tokens was refused
    double* seconds;     // [sequences], of the slowest mask
    int64_t threads;
};

bool has(const uint32_t* bits, uint32_t token) { return bits[token / 32] >> token % 32 & 1; }

double seconds_of(clockid_t clock) {
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

// One sequence: its matcher, and the masks to fill.
struct Sequence {
    const Arguments& a;
    Stopwatch& watch;
    int64_t index;
    void* matcher;
    const uint32_t *tokens, *stops;
    int64_t num_new, num_drafted;
    uint32_t* mask;

    Sequence(const Arguments& args, int64_t i, Stopwatch& stopwatch)
        : a(args), watch(stopwatch), index(i), matcher(args.matchers[i]), stops(args.stop_bits[i]) {
        const int64_t start = i ? a.token_ends[i - 1] : 0;
        num_drafted = a.num_drafted[i];
        num_new = a.token_ends[i] - start - num_drafted;
        tokens = a.tokens + start;
        mask = a.masks + a.first_masks[i] * a.words;
    }

    void run() {
        a.outcomes[index] = follow();
        if (a.outcomes[index] != FILLED) allow_all(0);
    }

    Outcome follow() {
        const Functions& f = *a.functions;
        if (!matcher) return ENDED;
        for (int64_t i = 0; i < num_new; i++) {
            if (has(stops, tokens[i])) return ENDED;
            if (f.consume_tokens(matcher, tokens + i, 1)) {
                a.places[index] = i;
                return REFUSED;
            }
        }
        Outcome outcome = fill(0);
        const uint32_t* draft = tokens + num_new;
        int64_t num_right = 0;
        for (; num_right < num_drafted && outcome == FILLED; num_right++) {
            const uint32_t* next = draft + num_right;
            if (has(stops, *next) || f.validate_tokens(matcher, next, 1) != 1) break;
            if (f.consume_tokens(matcher, next, 1)) return FAILED;
            outcome = fill(num_right + 1);
        }
        if (outcome != FILLED) return outcome;
        allow_all(num_right + 1);  // what is drawn behind a token that cannot come is dropped
        return num_right && f.rollback(matcher, (size_t)num_right) ? STUCK : FILLED;
    }

    // The mask of the tokens that may come where the matcher stands.
    Outcome fill(int64_t place) {
        const Functions& f = *a.functions;
        uint32_t* bits = mask + place * a.words;
        if (f.is_stopped(matcher)) {
            memset(bits, 0, (size_t)a.words * sizeof *bits);
        } else {
            watch.start();
            const int32_t failed = f.compute_mask_into(matcher, bits, (size_t)a.words * sizeof *bits);
            const double seconds = watch.stop();
            if (seconds > a.seconds[index]) a.seconds[index] = seconds;
            if (failed) return FAILED;
            if (seconds > a.max_seconds) return SLOW;
        }
        if (f.is_error(matcher)) return FAILED;
        const uint32_t ends = f.is_accepting(matcher) ? ~0u : 0u;
        for (int64_t w = 0; w < a.words; w++) bits[w] = (bits[w] & a.text_bits[index][w]) | (stops[w] & ends);
        return FILLED;
    }

    void allow_all(int64_t first) {
        memset(mask + first * a.words, 0xFF, (size_t)((1 + num_drafted - first) * a.words) * sizeof *mask);
    }
};

// The tokens of texts, as a function in Python divides them; those asked for before are known.
class TokensOfTexts {
  public:
    // Writes up to `size` tokens, and returns how many there are.
    using Divide = size_t (*)(const void*, const uint8_t*, size_t, uint32_t*, size_t);

    explicit TokensOfTexts(Divide divide) : divide_(divide) {}

    size_t of(const uint8_t* text, size_t length, uint32_t* tokens, size_t size) {
        const std::string key(reinterpret_cast<const char*>(text), length);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            const auto found = known_.find(key);
            if (found != known_.end()) return copied(found->second, tokens, size);
        }
        std::vector<uint32_t> made(length + 1);  // a token has at least one byte
        const size_t count = divide_(nullptr, text, length, made.data(), made.size());
        made.resize(count < made.size() ? count : made.size());
        std::lock_guard<std::mutex> lock(mutex_);
        if (num_bytes_ > MAX_BYTES) known_.clear(), num_bytes_ = 0;
        num_bytes_ += length + made.size() * sizeof made[0] + 64;
        const size_t written = copied(made, tokens, size);
        known_.emplace(key, std::move(made));
        return written;
    }

  private:
    static constexpr size_t MAX_BYTES = 4 << 20;

    static size_t copied(const std::vector<uint32_t>& from, uint32_t* tokens, size_t size) {
        const size_t count = from.size() < size ? from.size() : size;
        if (count) memcpy(tokens, from.data(), count * sizeof *tokens);
        return from.size();
    }

    Divide divide_;
    std::mutex mutex_;
    size_t num_bytes_ = 0;
    std::unordered_map<std::string, std::vector<uint32_t>> known_;
};

}  // namespace

extern "C" {

void grammar_fill(const Arguments* a) {
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
        Stopwatch watch;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a->sequences; i++) Sequence(*a, i, watch).run();
    }
}

TokensOfTexts* grammar_texts_new(TokensOfTexts::Divide divide) { return new TokensOfTexts(divide); }

void grammar_texts_free(TokensOfTexts* texts) { delete texts; }

// llguidance's LlgTokenizeFn, whose user data is a TokensOfTexts.
size_t grammar_texts_divide(const void* texts, const uint8_t* text, size_t length, uint32_t* tokens, size_t size) {
    return const_cast<TokensOfTexts*>(static_cast<const TokensOfTexts*>(texts))->of(text, length, tokens, size);
}
}
