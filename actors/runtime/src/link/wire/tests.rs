//! Any frame survives the wire; nothing else is taken for one, and a lie about a length costs no memory.

use super::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::executor::TokenLogprobs;
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::job::{Dropped, Failure, FinishReason, Overdue, Target};
use tokenrouter_core::live::{LiveNote, LiveNotes, Stamp};
use tokenrouter_core::peer::{Ahead, PeerFrame, PeerReq};
use tokenrouter_core::request::{Committed, RequestSpec};
use tokenrouter_core::sampling::SamplingParams;

fn model() -> impl Strategy<Value = ModelIdx> {
    any::<u8>().prop_map(ModelIdx)
}

fn id() -> impl Strategy<Value = RequestId> {
    any::<u64>().prop_map(RequestId)
}

fn stamp() -> impl Strategy<Value = Stamp> {
    any::<(u64, u64)>().prop_map(|(life, seq)| Stamp { life, seq })
}

fn notes() -> impl Strategy<Value = LiveNotes> {
    let note = (model(), stamp(), any::<u32>()).prop_map(|(origin, stamp, count)| LiveNote { origin, stamp, count });
    vec(note, 0..9).prop_map(LiveNotes::from)
}

fn finish() -> impl Strategy<Value = FinishReason> {
    prop_oneof![
        Just(FinishReason::EndOfText),
        any::<u32>().prop_map(FinishReason::StopToken),
        ".*".prop_map(FinishReason::StopString),
        Just(FinishReason::Length),
    ]
}

fn failure() -> impl Strategy<Value = Failure> {
    prop_oneof![
        (".*", ".*").prop_map(|(model, reason)| Failure::Executor { model, reason }),
        ".*".prop_map(Failure::Routing),
        Just(Failure::Stopped),
        ".*".prop_map(Failure::Internal),
        (any::<bool>(), any::<Duration>()).prop_map(|(first, limit)| Failure::TimedOut {
            overdue: if first { Overdue::FirstToken } else { Overdue::End },
            limit,
        }),
    ]
}

prop_compose! {
    fn sampling()(
        (temperature, top_p, min_p) in any::<(f32, f32, f32)>(),
        penalties in any::<(f32, f32, f32)>(),
        (top_k, seed) in any::<(u32, u64)>(),
        logit_bias in vec(any::<(u32, f32)>(), 0..4),
    ) -> SamplingParams {
        let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
        SamplingParams {
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed,
        }
    }
}

fn form((json, text): (bool, String)) -> Arc<ConstraintSpec> {
    Arc::new(if json { ConstraintSpec::Json(text) } else { ConstraintSpec::Lark(text) })
}

prop_compose! {
    fn spec()(
        (id, home, models) in (id(), model(), any::<u8>()),
        (prompt_len, len_max, len_min) in any::<(u32, u32, u32)>(),
        (eos, stop_ids) in (vec(any::<u32>(), 0..4), vec(any::<u32>(), 0..4)),
        sampling in sampling(),
        constraint in prop::option::of((any::<bool>(), ".{0,30}").prop_map(form)),
        target in prop_oneof![Just(Target::Routed), model().prop_map(Target::Only)],
        routing in prop::option::of(".{0,20}"),
        (logprobs, entropy, algorithm) in any::<(Option<u8>, bool, u32)>(),
    ) -> RequestSpec {
        let sampling = Arc::new(sampling);
        RequestSpec {
            id, home, models, prompt_len, len_max, len_min, eos, stop_ids, sampling, constraint, target, algorithm, routing,
            logprobs, entropy,
        }
    }
}

prop_compose! {
    fn request()(
        request in id(),
        (home, from, to) in (model(), model(), model()),
        spec in option::of(spec().prop_map(Arc::new)),
        (base, hops, cached, barren) in any::<(u32, u32, u32, u8)>(),
        tokens in vec(any::<u32>(), 0..40),
        known in vec(any::<u32>(), 0..9),
        live in notes(),
        ext in vec(any::<u8>(), 0..9),
        dropped in option::of(dropped()),
    ) -> PeerReq {
        let (tokens, known) = (tokens.into(), known.into());
        PeerReq { request, home, from, to, spec, base, tokens, known, hops, cached, barren, dropped, live, ext, left: None }
    }
}

prop_compose! {
    fn dropped()(model in model(), (entropy, score) in any::<(Option<f32>, Option<f32>)>()) -> Dropped {
        Dropped { model, entropy, score }
    }
}

prop_compose! {
    fn committed()(
        request in id(),
        (position, token, hops, cached) in any::<(u32, u32, u32, u32)>(),
        model in model(),
        entropy in any::<Option<f32>>(),
        dropped in option::of(dropped()),
        logprobs in option::of((any::<f32>(), vec(any::<(u32, f32)>(), 0..4))),
        finish in option::of(finish()),
    ) -> Committed {
        let logprobs = logprobs.map(|(chosen, top)| TokenLogprobs { chosen, top });
        Committed { request, position, token, model, entropy, dropped, logprobs, hops, cached, finish }
    }
}

fn frame() -> impl Strategy<Value = PeerFrame> {
    prop_oneof![
        vec(request(), 0..4).prop_map(PeerFrame::Requests),
        vec(committed(), 0..5).prop_map(PeerFrame::Emit),
        (id(), failure()).prop_map(|(id, failure)| PeerFrame::Failed(id, failure)),
        id().prop_map(PeerFrame::Release),
        notes().prop_map(PeerFrame::Live),
        (spec(), vec(any::<u32>(), 0..40))
            .prop_map(|(spec, prompt)| PeerFrame::Ahead(Arc::new(Ahead { spec: Arc::new(spec), prompt }))),
        Just(PeerFrame::Restarted),
        Just(PeerFrame::Missed),
    ]
}

fn parcel() -> impl Strategy<Value = Parcel> {
    (model(), model(), stamp(), frame())
        .prop_map(|(to, from, stamp, frame)| Parcel { to, envelope: Envelope { from, stamp, frame } })
}

fn read(bytes: &[u8], limit: usize) -> Result<Vec<u8>, WireError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(read_frame(&mut &bytes[..], limit))
}

proptest! {
    #[test]
    fn frames_survive_the_wire(parcels in vec(parcel(), 1..4)) {
        let bytes: Vec<u8> = parcels.iter().flat_map(|parcel| encode(parcel).expect("it is short")).collect();
        let mut rest = &bytes[..];
        for parcel in &parcels {
            let content = read(rest, FRAME_BYTES_MAX).expect("a frame");
            rest = &rest[LENGTH_BYTES + content.len()..];
            let back: Parcel = decode(&content).expect("what was written");
            prop_assert_eq!(format!("{back:?}"), format!("{parcel:?}"));
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn parts_of_frames_and_more_than_frames_are_refused(parcel in parcel(), cut in any::<prop::sample::Index>(), more in 1usize..9) {
        let bytes = encode(&parcel).expect("it is short");
        let content = &bytes[LENGTH_BYTES..];
        let cut = cut.index(content.len());
        prop_assert!(matches!(decode::<Parcel>(&content[..cut]), Err(WireError::Decode(_))));
        let surplus = [content, &vec![0; more]].concat();
        prop_assert!(matches!(decode::<Parcel>(&surplus), Err(WireError::Decode(_))));
        let truncated = read(&bytes[..LENGTH_BYTES + cut], FRAME_BYTES_MAX);
        let Err(WireError::Truncated { announced, got }) = truncated else { panic!("{truncated:?}") };
        prop_assert_eq!((announced, got), (content.len(), cut));
    }

    /// What noise is taken for, if for anything, is a frame that means the same when it is written again.
    #[test]
    fn noise_never_panics(noise in vec(any::<u8>(), 0..200)) {
        if let Ok(parcel) = decode::<Parcel>(&noise) {
            let again = encode(&parcel).expect("it is short");
            let back: Parcel = decode(&again[LENGTH_BYTES..]).expect("what was written");
            prop_assert_eq!(format!("{back:?}"), format!("{parcel:?}"));
        }
        prop_assert!(decode_hello(&noise).is_err());
    }

    /// Frames that were right before some bytes were changed.
    #[test]
    fn damaged_frames_never_panic(parcel in parcel(), damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut content = encode(&parcel).expect("it is short").split_off(LENGTH_BYTES);
        for (at, byte) in damage {
            let at = at.index(content.len());
            content[at] = byte;
        }
        if let Ok(parcel) = decode::<Parcel>(&content) {
            prop_assert!(encode(&parcel).is_ok());
        }
    }
}

/// Highest memory the process has ever taken, in bytes (Linux).
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).expect("a peak");
    let kib = line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number");
    kib << 10
}

/// A list of a milliard tokens that is not there.
#[test]
fn a_claimed_length_takes_no_memory() {
    let before = peak_bytes();
    let claim = |head: &[u8]| {
        let mut content = head.to_vec();
        content.extend([252, 0, 0, 0, 64]); // the length 2^30 in bincode's varint
        content.extend([7; 50]);
        assert!(matches!(decode::<Parcel>(&content), Err(WireError::Decode(_))));
    };
    claim(&[1, 0, 1, 1, 1]); // Emit
    claim(&[1, 0, 1, 1, 4]); // Live
    claim(&[1, 0, 1, 1, 0, 9, 0, 0, 1, 0, 5]); // the tokens of a Request
    claim(&[1, 0, 1, 1, 0, 9, 0, 0, 1, 0, 5, 1, 7]); // its known lengths
    claim(&[1, 0, 1, 1, 2, 9, 3]); // the text of a failure
    let taken = peak_bytes() - before;
    assert!(taken < 1 << 30, "{taken} bytes");
}

#[test]
fn lengths_over_the_limit_and_empty_streams_are_refused() {
    let long = [&(FRAME_BYTES_MAX as u32 + 1).to_le_bytes()[..], &[0; 64]].concat();
    assert!(matches!(read(&long, FRAME_BYTES_MAX), Err(WireError::TooLong { bytes, limit }) if bytes == limit + 1));
    assert!(matches!(read(&[255; 8], FRAME_BYTES_MAX), Err(WireError::TooLong { .. })));
    assert!(matches!(read(&[], FRAME_BYTES_MAX), Err(WireError::Io(_))));
    assert!(matches!(read(&[1, 0], FRAME_BYTES_MAX), Err(WireError::Io(_))));
    assert_eq!(read(&BEAT, FRAME_BYTES_MAX).expect("a frame without content"), Vec::<u8>::new());
    let text = "x".repeat(FRAME_BYTES_MAX + 1);
    assert!(matches!(encode(&Answer::Refused(text)), Err(WireError::TooLong { .. })));
}

#[test]
fn another_protocol_is_named_before_anything_else_is_read() {
    let error = decode_hello(&[9, 255, 255, 255]).expect_err("another protocol");
    assert!(matches!(error, WireError::Protocol { theirs: 9 }));
    assert_eq!(error.to_string(), "the peer speaks protocol 9, this process 5; run the same version in all processes");
}
