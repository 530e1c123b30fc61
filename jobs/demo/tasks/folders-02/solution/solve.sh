#!/bin/bash
set -e
cd /app
mkdir hazel amber pebble
