// Where the time of steps goes, by kind of operation, beside what these had to compute and to read; and what the
// machine could do at most.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace octavo {

// What an operation computes, two for each multiply-add, and the bytes of weights and of the KV cache that it has to
// read: activations stay in the caches of the processor.
struct Cost {
    int64_t operations[FORM_COUNT] = {};
    int64_t bytes = 0;
};

struct OpTime {
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
};

class Profile {
public:
    // By name; of steps in which every sequence has one token, and of those in which some has more.
    using Times = std::map<std::string, OpTime>;

    Times& of(const Step& step) { return step.tokens_count > step.sequences ? prefill_ : decode_; }
    const Times& prefill() const { return prefill_; }
    const Times& decode() const { return decode_; }

    // Adds a run of a program of which `laps` tells the times.
    static void add(const Program& program, const Batch& batch, int rows, const Laps& laps, Times& times);

private:
    Times prefill_;
    Times decode_;
};

// What the processor can do with all threads of a pool at once; the best of several short tries.
struct Roofline {
    double bytes_per_second;                   // read from memory
    double operations_per_second[FORM_COUNT];  // as Cost counts them
};

Roofline measure_roofline(Pool& pool);

}  // namespace octavo
