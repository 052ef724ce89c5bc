// Masks of the tokens that the grammars of many sequences allow next.
#include "grammar.h"

#include "openmp.h"

// `tried` [places]: a token; negative: none. `masks` [places, words], filled where the token is not allowed, and
// `is_filled` [places] says where; behind a sequence's end, and behind a draft that cannot come, all is allowed.
extern "C" void grammar_fill(const grammar::Arguments* a, const int64_t* tried, uint32_t* masks, uint8_t* is_filled) {
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
    {
        grammar::Stopwatch watch;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a->sequences; i++) {
            grammar::Sequence sequence(*a, i, watch);
            const int64_t num_visited = sequence.follow([&](int64_t place, grammar::Sequence& at) {
                const grammar::Verdict verdict = at.judge(tried[place], masks + place * a->words);
                is_filled[place] = verdict == grammar::NOT_ALLOWED;
                return verdict;
            });
            for (int64_t n = num_visited; n <= sequence.num_drafted; n++) {
                const int64_t place = sequence.first_place + n;
                memset(masks + place * a->words, 0xFF, (size_t)a->words * sizeof *masks);
                is_filled[place] = tried[place] < 0;
            }
        }
    }
}
