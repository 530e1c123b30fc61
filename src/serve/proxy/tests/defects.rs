//! Defects of the original Lego-RL that touch a trial's tokens, its requests or its end, and the test that holds
//! each here. Others of its defects (start-up, preflight, runners) are held where their parts are.

/// What went wrong, and `file: test`.
const HELD: [(&str, &str); 32] = [
    (
        "log-probs of a changed history were computed again with wrong positions, and the trial was lost",
        "src/serve/proxy/capture/tests/mod.rs: every_sampled_token_counts_once_where_the_engine_saw_it",
    ),
    (
        "text that was tokenised again was trained on as if sampled, with log-prob 0",
        "src/serve/proxy/capture/tests/mod.rs: rewritten_history_branches_and_shared_tokens_count_once",
    ),
    (
        "the header between two assistant messages was lost",
        "src/serve/proxy/capture/tests/templates.rs: the_suffix_of_a_long_conversation_is_that_of_a_short_one",
    ),
    (
        "log-probs and ids of different lengths dropped the trial at its end",
        "src/serve/engine/vllm/tests.rs: what_a_backend_lacks_is_said",
    ),
    (
        "a request after the trial's end was served and left a session behind",
        "src/serve/proxy/tests/mod.rs: wrong_requests_are_answered_in_openais_shape",
    ),
    (
        "a changed date in a short system prompt moved the main conversation to an untrained one",
        "src/serve/proxy/capture/tests/branches.rs: a_request_for_a_summary_is_told_by_the_conversation_that_begins_with_its_reply",
    ),
    (
        "sub-agents were never trained, and parallel ones met in one record",
        "src/serve/proxy/capture/tests/branches.rs: kinds_of_conversations_beside_the_main_one",
    ),
    (
        "a client that went away left its generation running, and its retry was sampled and counted twice",
        "src/serve/proxy/tests/mod.rs: a_client_that_goes_away_cancels_its_generation",
    ),
    (
        "a newer request for the same turn ended the older one",
        "src/serve/proxy/tests/mod.rs: a_retry_joins_the_running_turn_or_gets_the_recorded_answer",
    ),
    (
        "replies cut by length counted as complete",
        "src/serve/proxy/tests/mod.rs: replies_cut_by_length_stop_text_or_bad_calls_are_told_apart",
    ),
    (
        "end-of-turn tokens and thoughts were part of the text",
        "src/serve/proxy/tests/messages.rs: a_tool_loop_with_thoughts_and_a_history_that_changes_its_form",
    ),
    (
        "tool calls were parsed without their schema",
        "src/model/tool_calls/tests.rs: xml_values_take_the_types_of_the_schema",
    ),
    (
        "argument text that was no JSON became empty arguments",
        "src/model/tool_calls/tests.rs: hermes_calls_content_and_malformed_ones",
    ),
    (
        "a notice of the proxy stood in the history and made the next request a mismatch",
        "src/serve/proxy/tests/mod.rs: turns_end_cleanly_at_the_limit_and_failures_of_the_engine_are_recorded",
    ),
    (
        "a new session could wait for admission for ever",
        "src/serve/session_scheduler/tests.rs: nobody_waits_longer_than_its_place_in_the_queue_allows",
    ),
    (
        "a probe for admission took a place of the balancer",
        "src/serve/proxy/router.rs: cancelling_aborts_the_engine_and_wakes_who_waits",
    ),
    (
        "admission was counted by worker process, not by replica",
        "src/serve/session_scheduler/tests.rs: each_replica_has_its_own_watermark",
    ),
    (
        "the reason of a wait was lost",
        "src/serve/proxy/router.rs: waits_are_counted_by_their_reason_and_end_with_one",
    ),
    (
        "the record had no tokens, masks and log-probs",
        "src/train/buffer/tests/record.rs: a_finished_trial_comes_back_as_it_was",
    ),
    (
        "an agent that crashed without a verdict was a completed zero",
        "src/rollout/trial/tests.rs: failures_of_the_infrastructure_are_no_rewards",
    ),
    (
        "failures of the infrastructure were stored as zeros and sorted out later",
        "src/rollout/workers/tests.rs: failures_are_repeated_and_then_dropped",
    ),
    (
        "masks of trials without tokens differed between loops",
        "src/train/buffer/tests/record.rs: a_dropped_trial_comes_back_as_it_was",
    ),
    (
        "a step of a Dockerfile that failed was a warning, and the broken environment was scored",
        "src/rollout/sandbox/process/tests/files.rs: a_failing_line_is_an_error_with_file_and_line",
    ),
    (
        "a network that could not be closed stayed open",
        "src/rollout/sandbox/process/tests/isolation.rs: the_only_way_out_is_the_proxy",
    ),
    (
        "processes were ended by name",
        "src/rollout/sandbox/process/instance.rs: a_recorded_process_is_killed_only_if_it_is_the_same",
    ),
    (
        "no secret: any sandbox could post to any session",
        "src/serve/proxy/tests/bad_input.rs: another_sessions_secret_opens_nothing_and_leaves_nothing",
    ),
    (
        "bodies above 1 MiB were refused as broken JSON, and the agent did not compact",
        "src/serve/proxy/tests/mod.rs: fifty_mebibytes_of_tool_output_are_refused_and_nothing_is_lost",
    ),
    (
        "a stream began when the generation was over, and nothing was sent in silence",
        "src/serve/proxy/tests/mod.rs: a_stream_gives_the_same_message_in_pieces",
    ),
    (
        "streams of chat completions were refused",
        "src/serve/proxy/tests/fuzz.rs: streams_tell_the_reply_whatever_it_says",
    ),
    (
        "count_tokens, the responses API, health and metrics were missing",
        "front/tests/serve.rs: chat_messages_and_responses_are_captured_as_the_script_says",
    ),
    (
        "shutting down cut off what ran",
        "front/tests/serve.rs: sigterm_drains",
    ),
    (
        "a tool's result that was an image alone became an empty text",
        "src/serve/proxy/capture/wire.rs: blocks_become_chat_messages_in_their_order",
    ),
];

/// The table names tests that exist.
#[test]
fn every_defect_has_its_test() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for (defect, held) in HELD {
        let (file, test) = held.split_once(": ").expect("file: test");
        let source = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        let found = source.find(&format!("fn {test}("));
        let before = found.map(|at| &source[..at]);
        let is_test = before.is_some_and(|b| {
            let lines = b.lines().rev().take(4);
            b.contains("proptest!")
                || lines
                    .into_iter()
                    .any(|l| l.contains("#[test]") || l.contains("::test"))
        });
        assert!(is_test, "{defect}: `{test}` is no test of {file}");
    }
}
