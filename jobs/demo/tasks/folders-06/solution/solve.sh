#!/bin/bash
set -e
cd /app
mkdir amber orchid marble
