//! Counter-based random numbers: a pure function of (seed, position, stream). Owner: whoever draws. Invariant: no
//! state, so batching, hops and timing cannot change a draw.

/// Separate streams, so that one position can be drawn from for several purposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Stream {
    /// Which token is sampled.
    Token = 1,
    /// Which model owns the next token (ensembles, Bernoulli routing).
    Owner = 2,
}

/// 64 random bits for this place: three rounds of the SplitMix64 finaliser over the key words.
pub fn bits(seed: u64, position: u32, stream: Stream) -> u64 {
    let keyed = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
    let placed = mix(keyed ^ u64::from(position).wrapping_mul(0xd1b5_4a32_d192_ed03));
    mix(placed ^ (stream as u64).wrapping_mul(0x8cb9_2ba7_2f3d_8dd7))
}

/// A number in `[0, 1)` with 53 random bits.
pub fn unit(seed: u64, position: u32, stream: Stream) -> f64 {
    (bits(seed, position, stream) >> 11) as f64 / (1u64 << 53) as f64
}

/// The SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection on 64 bits.
pub fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
