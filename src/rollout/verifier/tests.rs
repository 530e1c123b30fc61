//! Rewards as verifiers write them.

use super::*;

#[test]
fn text_rewards() {
    let reward = |text: &str| parse_text(text).map(|r| r["reward"]);
    assert_eq!(reward("1\n"), Ok(1.0));
    assert_eq!(reward(" -0.25 "), Ok(-0.25));
    assert_eq!(reward("1e-3"), Ok(0.001));
    assert_eq!(reward(""), Err(RewardError::Empty));
    for text in ["nan", "NaN", "inf", "-Infinity", "1e999"] {
        assert!(matches!(reward(text), Err(RewardError::NotFinite(_))), "{text}");
    }
    for text in ["\n", "passed", "1 2", "0x10", "{\"reward\": 1}"] {
        let error = reward(text).unwrap_err();
        assert!(matches!(error, RewardError::NotNumeric { .. }), "{text}");
        assert!(error.to_string().contains(text.trim()), "{error}");
    }
}

#[test]
fn json_rewards() {
    let rewards = parse_json(r#"{"reward": 0.5, "style": 2, "ok": true}"#).unwrap();
    assert_eq!(rewards["reward"], 0.5);
    assert_eq!(rewards["style"], 2.0);
    assert_eq!(rewards["ok"], 1.0);
    for text in [
        "{}",
        "1.0",
        "[1.0]",
        "null",
        r#"{"reward": "1"}"#,
        r#"{"reward": null}"#,
        r#"{"reward": {"a": 1}}"#,
        r#"{"reward": NaN}"#,
        r#"{"reward": 1e999}"#,
        r#"{"reward": 1"#,
    ] {
        assert!(
            matches!(parse_json(text), Err(RewardError::NotNumeric { .. })),
            "{text}"
        );
    }
    assert_eq!(parse_json(""), Err(RewardError::Empty));
}

#[test]
fn the_scalar_is_the_reward_or_the_mean() {
    let verdict = |text: &str| Verdict {
        rewards: parse_json(text).unwrap(),
        exit_code: Some(0),
    };
    assert_eq!(verdict(r#"{"reward": 0.25, "other": 9}"#).reward(), 0.25);
    assert_eq!(verdict(r#"{"a": 1, "b": 0, "c": 0.5}"#).reward(), 0.5);
}
