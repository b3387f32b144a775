// The tile: what one thread of one block of a launch does. It is code for the host as well, so that tests run
// whole grids without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "element.h"

// On the device the loops over a thread's registers must be unrolled, or the registers become memory.
#ifdef __CUDA_ARCH__
#define LITE_EXT_UNROLL _Pragma("unroll")
#define LITE_EXT_ROLLED _Pragma("unroll 1")
#else
#define LITE_EXT_UNROLL
#define LITE_EXT_ROLLED
#endif

namespace lite_ext::cast {

// Elements of a tile, the work of a block of kThreads threads.
inline constexpr std::int64_t kTileElements = 4096;
inline constexpr std::uint32_t kThreads = 256;

// What a launch is told of its leaves, by value: there is nothing to copy to the device, nor to keep for a
// replay.
template <std::uint32_t Capacity>
struct LaunchArgs {
    const void* source[Capacity];
    void* target[Capacity];
    std::uint64_t extent[Capacity];    // see make_extent
    std::uint32_t tile_end[Capacity];  // tiles of the launch up to the end of this leaf
    std::uint32_t leaves;
};

// The number of elements, and above it the two dtypes.
inline constexpr unsigned kCountBits = 56;
inline constexpr unsigned kSourceBits = 60;
constexpr std::uint64_t make_extent(std::int64_t count, DType source, DType target) {
    return static_cast<std::uint64_t>(source) << kSourceBits | static_cast<std::uint64_t>(target) << kCountBits |
           static_cast<std::uint64_t>(count);
}

struct Tile {
    std::uint32_t leaf;
    DType source_dtype;
    DType target_dtype;
    std::int64_t begin;   // its first element in the leaf
    std::uint32_t count;  // its elements, at most kTileElements
};

template <std::uint32_t Capacity>
LITE_EXT_HOST_DEVICE Tile locate(const LaunchArgs<Capacity>& args, std::uint32_t block) {
    std::uint32_t low = 0;
    for (std::uint32_t high = args.leaves - 1; low < high;) {
        const std::uint32_t middle = (low + high) / 2;
        if (args.tile_end[middle] <= block) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const std::uint32_t before = low == 0 ? 0U : args.tile_end[low - 1];
    const std::uint64_t extent = args.extent[low];
    const auto count = static_cast<std::int64_t>(extent & ((std::uint64_t{1} << kCountBits) - 1));
    const std::int64_t begin = static_cast<std::int64_t>(block - before) * kTileElements;
    const std::int64_t rest = count - begin;
    return {.leaf = low,
            .source_dtype = static_cast<DType>(extent >> kSourceBits),
            .target_dtype = static_cast<DType>(extent >> kCountBits & 0xFU),
            .begin = begin,
            .count = static_cast<std::uint32_t>(rest < kTileElements ? rest : kTileElements)};
}

template <class Element, std::uint32_t Count>
struct alignas(sizeof(Element) * Count) Vector {
    Element items[Count];
};

// How the tile reaches memory and converts what it loaded. A device may have its own.
struct PlainAccess {
    template <class Value>
    LITE_EXT_HOST_DEVICE static Value load(const Value* from) {
        return *from;
    }
    template <class Value>
    LITE_EXT_HOST_DEVICE static void store(Value* to, const Value& value) {
        *to = value;
    }
    template <DType Source, DType Target, std::uint32_t Count>
    LITE_EXT_HOST_DEVICE static Vector<storage_t<Target>, Count> convert(const Vector<storage_t<Source>, Count>& from) {
        Vector<storage_t<Target>, Count> to;
        for (std::uint32_t i = 0; i < Count; ++i) to.items[i] = convert_element<Source, Target>(from.items[i]);
        return to;
    }
};

// One thread's part of the conversion of `count` consecutive elements. Vectors are 16 bytes on the wider side, and
// begin where the target is aligned: what lies before the first and after the last goes element by element.
template <class Access, DType Source, DType Target>
struct TileCast {
    using From = storage_t<Source>;
    using To = storage_t<Target>;
    static constexpr std::uint32_t kWide = sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To);
    static constexpr std::uint32_t kVector = 16 / kWide;
    // Loads in flight before the first store, unless the tile has fewer vectors a thread.
    static constexpr std::uint32_t kRounds = static_cast<std::uint32_t>(kTileElements) / (kThreads * kVector);
    static constexpr std::uint32_t kUnroll = kRounds < 4 ? kRounds : 4;
    using FromVector = Vector<From, kVector>;
    using ToVector = Vector<To, kVector>;
    // Between load and store a vector waits in the form that takes fewer registers: they limit the blocks at once.
    static constexpr bool kConvertFirst = sizeof(To) < sizeof(From);
    using Held = std::conditional_t<kConvertFirst, ToVector, FromVector>;

    LITE_EXT_HOST_DEVICE static void run(const From* from, To* to, std::uint32_t count, std::uint32_t thread) {
        const auto past = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(to) % sizeof(ToVector));
        std::uint32_t head = past == 0 ? 0U : static_cast<std::uint32_t>((sizeof(ToVector) - past) / sizeof(To));
        if (head > count) head = count;
        const std::uint32_t vectors = (count - head) / kVector;
        const std::uint32_t edges = count - vectors * kVector;
        if (thread < edges) {
            const std::uint32_t i = thread < head ? thread : thread + vectors * kVector;
            one(from + i, to + i);
        }
        if (reinterpret_cast<std::uintptr_t>(from + head) % sizeof(FromVector) == 0) {
            body<true>(from + head, to + head, vectors, thread);
        } else {
            body<false>(from + head, to + head, vectors, thread);
        }
    }

   private:
    LITE_EXT_HOST_DEVICE static void one(const From* from, To* to) {
        const Vector<From, 1> value{{Access::load(from)}};
        Access::store(to, Access::template convert<Source, Target, 1>(value).items[0]);
    }

    template <bool Aligned>
    LITE_EXT_HOST_DEVICE static void body(const From* from, To* to, std::uint32_t vectors, std::uint32_t thread) {
        if (thread >= vectors) return;
        // Offsets from here on are constants, so that they take no registers.
        from += thread * kVector;
        to += thread * kVector;
        const std::uint32_t mine = vectors - thread;  // the vectors from this thread's first one on
        LITE_EXT_ROLLED
        for (std::uint32_t round = 0; round < kRounds; round += kUnroll) {
            Held held[kUnroll];
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < kUnroll; ++i) {
                const std::uint32_t at = (round + i) * kThreads;
                if (at < mine) held[i] = convert_if<kConvertFirst>(load<Aligned>(from + at * kVector));
            }
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < kUnroll; ++i) {
                const std::uint32_t at = (round + i) * kThreads;
                if (at < mine) {
                    Access::store(reinterpret_cast<ToVector*>(to + at * kVector), convert_if<!kConvertFirst>(held[i]));
                }
            }
        }
    }

    // Float16 and bfloat16 lie in memory as the same type: it is not the types that say what is still to be done.
    template <bool Convert, class Given>
    LITE_EXT_HOST_DEVICE static auto convert_if(const Given& given) {
        if constexpr (Convert) {
            return Access::template convert<Source, Target, kVector>(given);
        } else {
            return given;
        }
    }

    template <bool Aligned>
    LITE_EXT_HOST_DEVICE static FromVector load(const From* from) {
        if constexpr (Aligned) {
            return Access::load(reinterpret_cast<const FromVector*>(from));
        } else {
            FromVector loaded;
            LITE_EXT_UNROLL
            for (std::uint32_t i = 0; i < kVector; ++i) loaded.items[i] = Access::load(from + i);
            return loaded;
        }
    }
};

template <class Access, DType Source, DType Target>
LITE_EXT_HOST_DEVICE void run_pair(const void* source, void* target, const Tile& tile, std::uint32_t thread) {
    if constexpr (Source != Target) {
        const auto* from = static_cast<const storage_t<Source>*>(source) + tile.begin;
        auto* to = static_cast<storage_t<Target>*>(target) + tile.begin;
        TileCast<Access, Source, Target>::run(from, to, tile.count, thread);
    }
}

template <class Access, DType Source>
LITE_EXT_HOST_DEVICE void run_target(const void* source, void* target, const Tile& tile, std::uint32_t thread) {
    switch (tile.target_dtype) {
        case DType::float16:
            return run_pair<Access, Source, DType::float16>(source, target, tile, thread);
        case DType::bfloat16:
            return run_pair<Access, Source, DType::bfloat16>(source, target, tile, thread);
        case DType::float32:
            return run_pair<Access, Source, DType::float32>(source, target, tile, thread);
        default:
            return run_pair<Access, Source, DType::float64>(source, target, tile, thread);
    }
}

// The work of one thread of one block of a launch. A block has one tile, hence one pair of dtypes: its
// threads do not diverge. Switches, not comparisons in a row: compilers merge what comparisons guard, at
// twice the registers.
template <class Access, std::uint32_t Capacity>
LITE_EXT_HOST_DEVICE void run_block(const LaunchArgs<Capacity>& args, std::uint32_t block, std::uint32_t thread) {
    const Tile tile = locate(args, block);
    const void* source = args.source[tile.leaf];
    void* target = args.target[tile.leaf];
    switch (tile.source_dtype) {
        case DType::float16:
            return run_target<Access, DType::float16>(source, target, tile, thread);
        case DType::bfloat16:
            return run_target<Access, DType::bfloat16>(source, target, tile, thread);
        case DType::float32:
            return run_target<Access, DType::float32>(source, target, tile, thread);
        default:
            return run_target<Access, DType::float64>(source, target, tile, thread);
    }
}

}  // namespace lite_ext::cast
